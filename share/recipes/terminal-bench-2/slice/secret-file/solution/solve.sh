#!/bin/bash
mkdir -p /app && echo hidden > /app/secret.txt && chmod 600 /app/secret.txt
