"""Says why a prompt is not found, and whether everything is set up well."""
