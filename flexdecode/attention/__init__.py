"""Which keys a query sees, and the weighted sum over them."""
