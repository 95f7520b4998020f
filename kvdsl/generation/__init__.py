"""Generate text under a policy and under the full cache, with times and sizes, for `kvdsl run`."""
