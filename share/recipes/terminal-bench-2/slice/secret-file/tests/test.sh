#!/bin/bash
if [ "$(cat /app/secret.txt)" = hidden ] && [ "$(stat -c %a /app/secret.txt)" = 600 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
