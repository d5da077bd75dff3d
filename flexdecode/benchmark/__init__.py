"""Measurements that anyone can run again. A benchmark states its ceiling and the fraction reached."""
