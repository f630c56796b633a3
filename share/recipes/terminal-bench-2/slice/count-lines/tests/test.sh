#!/bin/bash
if [ "$(cat /app/lines)" = "$(wc -l < /etc/passwd)" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
