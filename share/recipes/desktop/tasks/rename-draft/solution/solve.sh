#!/bin/bash
exec python3 /solution/solve.py
