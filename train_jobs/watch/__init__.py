"""Whether a rank gets on, where it stands, and its end where it hangs; no Ray, no torch."""
