"""What stands in front of the gateways: HAProxy, with a configuration of our own."""
