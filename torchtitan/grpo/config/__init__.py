"""From TOML and command line to one checked configuration. The keys themselves are in `config/job_config.py`."""
