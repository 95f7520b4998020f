"""Text under a policy and under the full cache: loading a model, generating, times and sizes, tables. What `kvdsl run` does."""
