"""`qk.export` and `qk.export_folder`: what the exporter writes, run once beside the module before it is handed out."""
