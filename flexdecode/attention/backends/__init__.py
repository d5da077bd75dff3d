"""Ways to compute attention, one file each. A backend states what it cannot do, and why."""
