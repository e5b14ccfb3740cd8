"""Our own findings, each as a question with one figure and a table of comparisons."""
