"""Pictures of runs: what is drawn is decided here, as values; Plotly and matplotlib draw it."""
