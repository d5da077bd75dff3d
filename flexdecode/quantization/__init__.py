"""Integer weights in one canonical form, and (later) the search that makes them."""
