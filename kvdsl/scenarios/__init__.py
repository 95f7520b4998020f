"""Tests in the language: they state attention step by step and expect what the policy keeps."""
