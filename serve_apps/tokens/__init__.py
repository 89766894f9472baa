"""The wire on which tokens go from replicas to gateways."""
