"""The dashboard: pages for a browser, that read the same API as everybody else."""
