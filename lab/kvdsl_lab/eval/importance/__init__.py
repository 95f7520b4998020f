"""Importance scores by themselves (RoCo, section 4.3), each as a policy that keeps what ranks highest and nothing else."""
