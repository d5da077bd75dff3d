"""The arithmetic worth writing ourselves, behind one door: `ops`."""
