"""Measuring speed: interleaved timing, and every baseline that a policy is compared with."""
