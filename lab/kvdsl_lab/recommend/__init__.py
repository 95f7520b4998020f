"""Which policy loses least on somebody's prompts, at the bytes that a request may take: what `kvdsl recommend` does."""
