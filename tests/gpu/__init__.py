"""What can only be measured on a GPU: one script for one short call."""
