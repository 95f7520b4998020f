"""What generated packages call. Needs torch; only `hf` needs transformers; nothing here needs the compiler."""
