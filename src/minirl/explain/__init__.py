"""What a launch script asks for, and what a training log says, option by option and metric by metric.

in: the text of a script or of a log -> out: tables with words from data/config_keys.yml and data/metrics.yml.
Both are parsed as text: nothing is executed, sourced or unpickled. verl: none
"""

from minirl.explain.arithmetic import batch_arithmetic
from minirl.explain.launch import Launch, explain_launch
from minirl.explain.log import Log, parse_log

__all__ = ["Launch", "Log", "batch_arithmetic", "explain_launch", "parse_log"]
