"""The public names, each with the module it lives in; read by type checkers and by __init__.py."""

from rallypoint.cli.in_process import config_from_args as config_from_args
from rallypoint.cli.in_process import get_args_parser as get_args_parser
from rallypoint.cli.in_process import main as main
from rallypoint.cli.in_process import parse_args as parse_args
from rallypoint.cli.in_process import run as run
from rallypoint.launch.api.elastic_agent import LocalElasticAgent as LocalElasticAgent
from rallypoint.launch.api.elastic_agent import RunResult as RunResult
from rallypoint.launch.api.elastic_agent import WorkerSpec as WorkerSpec
from rallypoint.launch.api.elastic_agent import WorkerState as WorkerState
from rallypoint.launch.api.elastic_launch import elastic_launch as elastic_launch
from rallypoint.launch.api.launch_config import DefaultLogsSpecs as DefaultLogsSpecs
from rallypoint.launch.api.launch_config import LaunchConfig as LaunchConfig
from rallypoint.launch.api.launch_config import Std as Std
from rallypoint.launch.child_failure import ChildFailedError as ChildFailedError
from rallypoint.launch.child_failure import ProcessFailure as ProcessFailure
