"""The runtime that generated packages import. It needs torch; only `hf` needs transformers. The compiler is not needed."""
