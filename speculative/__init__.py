"""What samples and scripts rest on: is a pair of models sound, and what does its draft gain."""
