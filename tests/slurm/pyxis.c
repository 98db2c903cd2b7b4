/* A SPANK plugin with the container options of pyxis, for sites that have no containers: each task of a step with an
 * image adds a line to the file of the argument log=FILE (host, options, command) and runs outside of any container. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <slurm/spank.h>

SPANK_PLUGIN(pyxis, 1);

enum { IMAGE, MOUNTS, WORKDIR, NAME, NUM_OPTIONS };
static const char *const names[NUM_OPTIONS] = {"container-image", "container-mounts", "container-workdir", "container-name"};
static char *values[NUM_OPTIONS];

static int take(int option, const char *value, int remote) {
	free(values[option]);
	values[option] = strdup(value);
	return 0;
}

int slurm_spank_init(spank_t spank, int argc, char **argv) {
	if (spank_context() == S_CTX_SLURMD || spank_context() == S_CTX_JOB_SCRIPT) return 0;
	for (int i = 0; i < NUM_OPTIONS; i++) {
		struct spank_option option = {(char *)names[i], "VALUE", "of the container", 1, i, take};
		if (spank_option_register(spank, &option) != ESPANK_SUCCESS) return -1;
	}
	return 0;
}

int slurm_spank_task_init(spank_t spank, int argc, char **argv) {
	char host[256], line[8192];
	char **command;
	int length = 0, size = 0;
	FILE *log;
	if (values[IMAGE] == NULL) return 0;
	if (argc != 1 || strncmp(argv[0], "log=", 4) != 0) return -1;
	if (spank_get_item(spank, S_JOB_ARGV, &length, &command) != ESPANK_SUCCESS) return -1;
	gethostname(host, sizeof host);
	size = snprintf(line, sizeof line, "%s", host);
	for (int i = 0; i < NUM_OPTIONS && size < (int)sizeof line; i++)
		size += snprintf(line + size, sizeof line - size, "\t%s", values[i] == NULL ? "" : values[i]);
	for (int i = 0; i < length && size < (int)sizeof line; i++)
		size += snprintf(line + size, sizeof line - size, "%s%s", i ? " " : "\t", command[i]);
	/* One write for a whole line: steps of several nodes share the file. */
	if ((log = fopen(argv[0] + 4, "a")) == NULL) return -1;
	fprintf(log, "%s\n", line);
	return fclose(log);
}
