"""Exits with 0 if the draft has its new name and its old text, and the notes say what they should."""

import os
import sys


def read(name):
    with open(f"/work/{name}") as file:
        return file.read()


renamed = not os.path.exists("/work/draft.txt") and read("final.txt") == "The meeting is on Thursday.\n"
sys.exit(not (renamed and read("notes.txt").strip() == "done"))
