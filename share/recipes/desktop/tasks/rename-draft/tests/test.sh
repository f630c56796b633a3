#!/bin/bash
mkdir -p /logs/verifier
reward=0
python3 /tests/check.py && reward=1
echo $reward > /logs/verifier/reward.txt
