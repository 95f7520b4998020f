"""What keeps looking for a text, a policy or an edit that goes wrong."""
