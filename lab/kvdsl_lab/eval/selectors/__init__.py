"""SparCas' ablation (table 2a): what a sketch may choose its dims by, each as a policy."""
