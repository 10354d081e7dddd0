"""What samples and scripts rest on: is a pair of models sound, how to decode losslessly with it, how to measure it."""
