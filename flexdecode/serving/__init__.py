"""Requests and answers in the shapes that other programs speak. Knows no command line."""
