"""The cluster in simulated time: a trace of jobs and a serving load under the real allocation; no Ray."""
