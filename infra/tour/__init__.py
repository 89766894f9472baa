"""The whole way through Shoal, which `shoal quickstart` goes."""
