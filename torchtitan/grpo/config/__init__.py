"""From TOML and command line to one checked configuration. The keys themselves are in `job_config.py`."""
