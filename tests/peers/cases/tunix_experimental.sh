python -m tunix.experimental.runtime.main --process_main=tunix.experimental.examples.words.main --max_steps=9
