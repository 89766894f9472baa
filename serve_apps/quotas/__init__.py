"""How much may be asked for: places in apps and limits of tenants, shared among gateways."""
