// Before the first paint: the theme that was chosen here, if any. The rest is the browser's preference.
const chosenTheme = localStorage.getItem("coordinator.theme");
if (chosenTheme === "dark" || chosenTheme === "light") document.documentElement.dataset.theme = chosenTheme;
