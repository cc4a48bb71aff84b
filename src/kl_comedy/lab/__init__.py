"""The laboratory: what the oracle says, drawn and measured over lengths, distances and optima."""
