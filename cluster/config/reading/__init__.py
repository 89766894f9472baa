"""How the file is read: YAML with positions, overrides, the schema, sentences about what is wrong."""
