MOST_S = 1.5
def measure(repeats): return {}
