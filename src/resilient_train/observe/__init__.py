"""What a run leaves to its reader: the events, the timeline of its recoveries, a report and a trace."""
