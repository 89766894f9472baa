"""Who may use which devices: the pure allocation, the broker that keeps the leases, its client."""
