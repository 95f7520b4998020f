"""The intermediate representation: nodes, visitors, printer."""
