"""LongBench and RULER from local files, in the formats and by the metrics that their authors published."""
