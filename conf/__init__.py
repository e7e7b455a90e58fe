"""The Hydra options of distdec, importable as `distdec.conf` (config_path="pkg://distdec.conf")."""
