"""The only place where names become objects: `build_engine(config)`, and `LLM` on top of it."""
