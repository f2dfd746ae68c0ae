"""The folder in which explanations of a data set are stored: manifest, shards, records and running summary."""
