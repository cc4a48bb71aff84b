"""The command line: the only room that sees every other. Heavy rooms are imported inside commands."""
