"""What tests of several rooms share. Real components only; no test module imports another."""
