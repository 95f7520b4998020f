"""The intermediate representation: nodes, axes, visitors, printer."""
