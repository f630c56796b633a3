import unittest

from calc import clamp, mean


class Calc(unittest.TestCase):
    def test_mean(self):
        self.assertEqual(mean([1, 2, 3]), 2)

    def test_clamp_low(self):
        self.assertEqual(clamp(-1, 0, 9), 0)
